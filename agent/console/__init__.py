"""What a person sees and does: the admin service, HTTP, status, explain, doctor."""
