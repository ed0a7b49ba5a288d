"""What people and programs read at the end. No communication between ranks here."""
