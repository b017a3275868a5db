"""Network interfaces and RDMA adapters, as sysfs and netlink show them."""
