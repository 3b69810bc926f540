"""What is done with the other ranks: exchanges, what they have alike and each has a share of, and when they leave."""
