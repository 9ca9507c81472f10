"""The frontend: owns a request from the client's first byte to the last token."""
