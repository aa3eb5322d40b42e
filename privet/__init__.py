"""What both sides of Privet share; knows neither app nor any method."""
