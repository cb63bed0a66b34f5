"""What all modes share that draft with a network: capture of the network, its passes, its place in a step."""
