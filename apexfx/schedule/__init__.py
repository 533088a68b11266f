"""When gradients travel: the bucket plan (data), and how torch DDP would have laid it out."""
