"""What sysfs and the kernel say of PCI functions."""
