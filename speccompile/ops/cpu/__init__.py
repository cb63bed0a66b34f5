"""The package's ops for the CPU, in C++: products over packed weights, and attention over live keys."""
