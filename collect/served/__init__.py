"""Records a sample of a server's requests into a trace that predictors can be trained on."""
