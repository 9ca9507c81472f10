"""HTTP/1.1 for clients: uvicorn's connections on httptools, with bounds on number, time and memory."""
