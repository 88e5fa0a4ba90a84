"""What user code keeps, hangs and changes on its module, and expects to find again on every rank."""
