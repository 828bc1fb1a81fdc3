"""The integration with Hugging Face Transformers."""
