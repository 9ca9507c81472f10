"""executor/utils.py@015884d6: the error of a failed request."""


class RequestError(RuntimeError):
    """The error raised when a request has failed."""
