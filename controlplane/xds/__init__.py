"""xDS for stock gRPC clients and Envoy: frontends of all regions over ADS, in priorities by the caller's region."""
