"""What tenants may use: limits that nest, and the buckets in Redis that hold what is left of them."""
