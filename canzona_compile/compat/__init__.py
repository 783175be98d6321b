"""What we use of torch beyond its promises."""
