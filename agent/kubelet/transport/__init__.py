"""gRPC on unix sockets: servers, clients, and bounds on what the other side may send."""
