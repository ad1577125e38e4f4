"""The checks behind `roundelay check`: versions, device, disk, ports, and the links between ranks."""
