"""The router: queues requests, places them by cache and load, and forwards tokens. It never touches text."""
