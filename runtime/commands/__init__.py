"""Commands that serve or measure a model, called with their typed configurations."""
