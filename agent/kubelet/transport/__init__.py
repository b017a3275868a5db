"""HTTP/2 on unix sockets as a kubelet speaks it: servers, bounds on what a client may send, calls that outlive who waits."""
