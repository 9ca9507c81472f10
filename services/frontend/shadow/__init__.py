"""Shadow traffic of a frontend: copies of users' requests, served by a core of their own, compared with their answers."""
