"""gRPC over HTTP/2 on asyncio, with one write per connection and turn of the event loop (the batched edge).

Imports go one way: server -> server_call -> connection -> stream -> codec, messages, fields. `codec` is the interface of
the HTTP/2 library; `h2_codec` is its implementation.
"""
