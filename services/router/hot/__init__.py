"""Hot prefixes: the released prompts of users and the shapes of their work, and the answer about them."""
