"""The frontend: owns a request from its client's first byte to the last token."""
