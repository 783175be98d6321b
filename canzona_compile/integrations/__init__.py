"""What frameworks need that is not in `wrap`: one module per framework, which imports it. Nothing else of ours does."""
