"""Routes of weight blocks from trainers to generators."""
