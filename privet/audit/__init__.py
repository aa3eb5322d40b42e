"""What a trained model gives away: membership inference, and a lower bound on epsilon from canaries."""
