"""The three roles side by side: plain classes of one shape. Know one, know all."""
