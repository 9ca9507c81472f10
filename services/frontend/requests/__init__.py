"""Admitted requests, pure: from admission to the last token, whatever fails behind the frontend."""
