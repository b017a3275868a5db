"""HTTP/2 as a gRPC server needs it: a connection that stands in h2's place beneath grpclib."""
