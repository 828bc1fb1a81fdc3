"""Zoo entries: predictors in folders and zoos, every byte checked before it is parsed."""
