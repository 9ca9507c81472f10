"""The folder of a model in the format of Hugging Face: tokenizer, chat template, end tokens, sampling defaults."""
