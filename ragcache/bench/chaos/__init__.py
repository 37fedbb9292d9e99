"""`ragcache bench chaos`: many requests of every kind, some of which leave; nothing may break."""
