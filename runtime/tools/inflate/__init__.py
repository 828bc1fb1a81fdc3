"""Models whose experts are larger and say the same: zero neurons appended to each."""
