"""What is minimised: divergences between teacher and student, and the losses built from them."""
