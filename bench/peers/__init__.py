"""One of four workers dies under 16 streams: kvmesh beside routers that a user could pick instead.

The routers come as wheels from PyPI, each into its own environment; behind them are mock workers that answer OpenAI chat
completions (`worker`). kvmesh runs with real engines in Triton. Everybody follows the same schedule (`experiment`).
"""
