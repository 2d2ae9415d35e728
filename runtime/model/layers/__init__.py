"""What are the layers of a model made of? Building blocks that model classes and trained draft heads share."""
