"""EAGLE-1 and EAGLE-2: a head of one layer over the target's last hidden state."""
