"""Multi-turn episodes: turns, tool calls, and the processes behind them."""
