"""What the two halves say to each other: messages, and lines of bytes."""
