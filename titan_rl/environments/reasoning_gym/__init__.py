"""Tasks of reasoning-gym, with exact checks where its own can be gamed."""
