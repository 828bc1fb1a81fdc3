"""The recipe of the reference model `qwen2-moe-tiny`: corpus, tokenizer, training and audit."""
