/* The control loop of a robot in C99: one step, without allocation, clock or file. It does what controller.py does.

   robot_init(&robot);
   every period:  read the sensors;  robot_step(&robot, now, &sensors, &command);  send the command;
   robot_request(&robot, ROBOT_MODE_STAND) and the like ask for a mode; robot_emergency_stop(&robot) damps it for good.

   robot_config.h and robot_config.c are written for one robot and its policies. One program drives one robot. */
#ifndef CANTER_ROBOT_H
#define CANTER_ROBOT_H

#include "robot_config.h"

enum robot_reason {
    ROBOT_NONE, ROBOT_REQUESTED, ROBOT_EMERGENCY, ROBOT_STALE, ROBOT_INVALID, ROBOT_STALLED, ROBOT_LATE, ROBOT_TILTED,
    ROBOT_OUTSIDE, ROBOT_FAST, ROBOT_ASTRAY, ROBOT_NOT_FINITE, ROBOT_REFUSED, ROBOT_OVER, ROBOT_ENDED
};

/* Readings one after the other in the order of robot_config.h, and the time of each. */
typedef struct {
    double value[ROBOT_VALUES];
    double stamp[ROBOT_SENSORS];
} robot_sensors;

/* torque = kp * (target - position) - kd * velocity */
typedef struct {
    double target[ROBOT_JOINTS], kp[ROBOT_JOINTS], kd[ROBOT_JOINTS];
} robot_command;

/* One part of an observation; sensor is the place of its first value, or one of those below. */
enum { ROBOT_LAST_ACTION = -1, ROBOT_ACTION_BEFORE = -2, ROBOT_GRAVITY = -3 };
typedef struct {
    int sensor, count, history, window;
    const int *columns;
    const double *offset, *scale;
    double sign, low, high;
} robot_segment;

typedef struct {
    const robot_segment *segments;
    int segment_count, action_count, is_relative, next_mode;
    unsigned enter_from;
    const int *actions;
    const double *pose, *scale, *target_low, *target_high, *smoothing, *kp, *kd;
    double blend, max_tilt, seconds;
    void (*reset)(void);
    void (*step)(const float *obs, float *action);
} robot_mode;

extern const robot_mode robot_modes[ROBOT_MODES];
extern const int robot_sensor_width[ROBOT_SENSORS];
extern const double robot_low[ROBOT_JOINTS], robot_high[ROBOT_JOINTS], robot_velocity[ROBOT_JOINTS];
extern const double robot_effort[ROBOT_JOINTS], robot_damping[ROBOT_JOINTS];
extern const char robot_log_header[];
extern const unsigned robot_log_header_size;

typedef struct {
    int mode, requested, is_stopped, is_started;
    int late, limited, reason, index;    /* reason, index and value: what happened in the last step */
    unsigned record;
    double value, last, entered, astray;
    double action[ROBOT_JOINTS], action_before[ROBOT_JOINTS], filtered[ROBOT_JOINTS], aim[ROBOT_JOINTS];
    double window[ROBOT_WINDOW];
    int is_window_empty;
    float obs[ROBOT_WIDTH];
    robot_command before, sent;
} robot;

#ifdef __cplusplus
extern "C" {
#endif

void robot_init(robot *r);
void robot_request(robot *r, int mode);
void robot_emergency_stop(robot *r);
void robot_step(robot *r, double now, const robot_sensors *sensors, robot_command *command);

/* Write one record of ROBOT_RECORD bytes for the log; a file is robot_log_header, then records. */
void robot_log_record(robot *r, double now, const robot_sensors *sensors, int overruns, double seconds,
                      unsigned char *record);

#ifdef __cplusplus
}
#endif
#endif
