"""Ray: the plain workers of pipeline/ as actors, behind the same pools and waiter as in one process."""
