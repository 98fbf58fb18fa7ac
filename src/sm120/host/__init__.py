"""What this machine is: facts, and the findings that rules draw from them."""
