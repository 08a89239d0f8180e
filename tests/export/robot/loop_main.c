/* Runs the control loop on steps from standard input and writes all results to standard output. */
#include "robot.h"

#include <stdio.h>

typedef struct {
    double now, request, stop; /* request: a mode, or -1 */
    robot_sensors sensors;
} frame;

int main(void)
{
    static robot r;
    static frame in;
    static unsigned char record[ROBOT_RECORD];
    robot_command command;
    robot_init(&r);
    fwrite(robot_log_header, 1, robot_log_header_size, stdout);
    while (fread(&in, sizeof in, 1, stdin) == 1) {
        if (in.request >= 0)
            robot_request(&r, (int)in.request);
        if (in.stop > 0)
            robot_emergency_stop(&r);
        robot_step(&r, in.now, &in.sensors, &command);
        robot_log_record(&r, in.now, &in.sensors, 3, 0.25, record);
        fwrite(record, sizeof record, 1, stdout);
        fwrite(&command, sizeof command, 1, stderr);
    }
    return 0;
}
