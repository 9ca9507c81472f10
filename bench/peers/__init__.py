"""One of four workers dies under 16 streams: kvmesh compared with routers from PyPI.

The routers come as wheels from PyPI, each into its own environment. Behind them are mock workers that answer OpenAI
chat completions (`worker`). kvmesh runs with real engines in Triton. All systems follow the same schedule
(`experiment`). A second comparison plays conversations on the same systems (`conversations`). A third one measures the CPU
of a token and of a request, with stub engines behind kvmesh (`costs`).
"""
