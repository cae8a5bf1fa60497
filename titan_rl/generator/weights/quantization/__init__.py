"""FP8 rollouts: linear layers of an engine in E4M3, made of each version as it arrives."""
