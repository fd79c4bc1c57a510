"""What an operator does to a state: the functions behind the command line."""
