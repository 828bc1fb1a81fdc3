"""Many prompts at the highest tokens a second: batches that go through the layers together."""
