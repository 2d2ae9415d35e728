"""Every test process serves on 8 virtual CPU devices."""

from meshserve.sharding.mesh import use_cpu_devices

use_cpu_devices(8)
