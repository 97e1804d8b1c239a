"""How true the simulator is: the same requests, fleet and policy live and simulated."""
