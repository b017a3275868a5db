"""What is done to hardware for pods: claim, prepare, reset, release; one job at a time for each piece of hardware."""
