"""Who a process is to its peers, and whom it believes: mutual TLS between the processes of a mesh."""
